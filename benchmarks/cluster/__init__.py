"""How a cluster scales, and how soon it is whole again."""
