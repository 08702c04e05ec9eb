"""Sluice's learner beside a plain synchronous loop. Reading order: loop, sluice_side, loop_rank."""
