"""Everything that imports Megatron-core: building, training, checkpointing the actor on one rank."""
