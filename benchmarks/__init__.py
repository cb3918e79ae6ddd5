"""Benchmarks: programs that measure, with a table and one JSON line each."""
