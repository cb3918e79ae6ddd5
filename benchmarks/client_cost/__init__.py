"""What a client costs its own process: the official SDK and tinkex against one stub server."""
