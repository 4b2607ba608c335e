"""Nothing to tune against tuned rivals: WNMuon at its default, the others over grids of λ."""
