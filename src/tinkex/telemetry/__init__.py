"""Events that the client reports to its server, next to its spans and metrics."""
