"""Sluice's learner beside a plain synchronous loop. Reading order: loop, rollouts, sluice_side, comparison, command."""
