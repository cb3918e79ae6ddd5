"""What it costs a node to pass a request on."""
