"""The draft's training: distillation of the actor's own samples, and how often draft and target would agree."""
