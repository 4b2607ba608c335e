"""What a training run is: its spec, its task, its data, its network, its programs."""
