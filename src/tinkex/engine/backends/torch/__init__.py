"""The plain reference of every primitive; it runs on any device."""
