"""Beyond ten million parameters: WNMuon with nothing set against AdamW and Muon, tuned."""
