"""Against the libraries people train with: `make test-integrations`."""
