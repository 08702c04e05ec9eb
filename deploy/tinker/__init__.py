"""`sluice tinker`: the learner's model and vLLM behind Tinker's API. Optional. Begin with app, journal, learning."""
