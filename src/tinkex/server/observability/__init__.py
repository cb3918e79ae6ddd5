"""What an operator sees of a server: metrics, readiness, logs and spans.

Everything here watches; nothing decides. The parts are handed over, so two servers in one
process share nothing.
"""
