"""What runs a server: its settings, its folder and address, the engine that is started again."""
