"""Three tenants' mixed work for a chosen time, with kills, and what it does to the server."""
