"""Records a step: events of the reducer, readings of clocks, exchange between ranks."""
