"""Whether our advantages, losses and estimates are those of verl, on the same tensors, in float64.

    python -m tests.benchmarks.agreement [--seed N] [--short]

Installs verl from the package index into a folder of its own under SLUICE_HOME/cache (once). --seed: the first of the
20 batches that are drawn; --short: three. Every batch is padded for verl and packed for us: turns with replies between
them, answers of one token, a group of equal rewards.

holds: no value of ours, and no gradient, is further than 1e-6 from verl's, relative to the largest of its kind.
"""

from tests.benchmarks.agreement.batch import make_batch
from tests.benchmarks.agreement.cases import cases
from tests.benchmarks.agreement.peer import load_peer
from tests.chaos.rig.verdict import conclude, options

_CLOSE = 1e-6


def main() -> int:
    given = options(str(__doc__))
    peer = load_peer()
    worst: dict[str, float] = {}
    seeds = range(given.seed, given.seed + (3 if given.short else 20))
    for seed in seeds:
        for name, ours, theirs in cases(make_batch(seed), peer):
            assert ours.shape == theirs.shape, name
            difference = float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-12))
            worst[name] = max(worst.get(name, 0.0), difference)
    for name, difference in worst.items():
        print(f"{name:<44} {difference:.1e}{'' if difference <= _CLOSE else '  differs'}")
    largest = max(worst.values())
    return conclude("agreement", largest <= _CLOSE, formulas=len(worst), batches=len(seeds), largest_difference=largest)


if __name__ == "__main__":
    raise SystemExit(main())
