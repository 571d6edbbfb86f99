"""From a normalized FX graph to a plan: facts about every node, regions that grow by cost, the order of steps."""
