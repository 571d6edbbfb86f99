"""Lowering to nvFuser: a spec becomes a recipe, and a recipe is replayed into a FusionDefinition."""
