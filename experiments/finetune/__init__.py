"""Fine-tuning without a learning rate: WNMuon against rivals as their users set them."""
