"""The mathematics: pure functions of tensors. Reading order: by_name, recipes, advantages/, losses/, corrections/."""
