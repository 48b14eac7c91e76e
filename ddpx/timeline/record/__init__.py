"""Records steps: events of the reducer, readings of clocks, and the exchange between ranks."""
