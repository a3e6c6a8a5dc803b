"""Random legal plans of ten models, run and compared with one device: 1,000 by default, half of them in time.

    python tests/random_plans_all.py                                   # the table of docs/planner.md
    python tests/random_plans_all.py --seeds 20 --model unet resnet

An even seed is a plan without micro-batches, an odd one has micro-batches and mostly stages. Prints what differs, and a
row a model.
"""

from __future__ import annotations

import argparse
import time

from random_plans import Subject, complaint, plan_of, timed_plan_of

TEN = ("gpt2", "llama", "bert", "t5", "moe", "vit", "resnet", "unet", "recurrent", "custom")


def one_model(name: str, seeds: range) -> int:
    """Prints what differs, then a row; returns how many plans differed."""
    start, subject = time.process_time(), Subject(name)
    wrong = {"whole": 0, "in time": 0}
    for seed in seeds:
        how, make = ("in time", timed_plan_of) if seed % 2 else ("whole", plan_of)
        try:
            why = complaint(subject, seed // 2, make)
        except Exception as error:  # a plan that cannot be made is told like one that differs
            why = f"no plan: {type(error).__name__}: {error}"
        if why:
            wrong[how] += 1
            print(f"{name} seed {seed // 2}, {how}: {why}", flush=True)
    plain, timed = (sum(seed % 2 == odd for seed in seeds) for odd in (0, 1))
    took = time.process_time() - start
    print(f"| {name} | {plain} | {wrong['whole']} | {timed} | {wrong['in time']} | {took:.0f} |", flush=True)
    return sum(wrong.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="*", default=list(TEN), help="names of random_plans.MODELS")
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    options = parser.parse_args()
    print("| model | plans | differ | plans in time | differ | CPU s |\n|---|---|---|---|---|---|")
    differ = sum(one_model(name, range(options.first, options.first + options.seeds)) for name in options.model)
    print(f"\n{len(options.model) * options.seeds} plans, {differ} differ from one device")


if __name__ == "__main__":
    main()
