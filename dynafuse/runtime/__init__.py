"""What happens when a compiled graph is called: launches, allocations, buffer lifetimes."""
