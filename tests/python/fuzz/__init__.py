"""Random programs and random faults; see CONTRIBUTING.md, `make fuzz`."""
