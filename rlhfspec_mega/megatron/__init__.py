"""Everything that imports Megatron-core: any number of models on one rank, built, trained, scored with and saved."""
