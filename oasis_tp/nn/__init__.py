"""Layers of a tensor-parallel decoder: each rank holds its shard, inference only."""
