"""Nodes of a cluster as actors on Ray: placed, supervised, added and removed.

Ray decides where a node runs and restarts it elsewhere when its machine is lost. What a node owns
is in the database; Ray knows nothing about it. Only `connection` imports ray.
"""
