"""The command line: `tinkex NOUN VERB`."""
