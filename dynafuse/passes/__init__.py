"""From graph to graph: each pass takes a graph that computes something and leaves one that computes the same."""
