"""Many nodes on one database: membership, placement, passing requests on."""
