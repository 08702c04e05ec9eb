"""Files of a run and of a model: names, whole writes, model folders."""
