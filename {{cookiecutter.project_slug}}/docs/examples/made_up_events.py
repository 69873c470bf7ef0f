"""Made-up events with a law to be learned, as the log of a shop or a film site: events.csv.

    python docs/examples/made_up_events.py

The next item of a user is of the same series as one of the last three (in 40 % of the cases), or else one of the user's
taste. A taste is a mixture of topics, and the popularity of each item drifts from month to month. Nobody has an item
twice. Ids are texts, and a year of events is written in the order of time.

Shapes: U users, I items, T topics, M months.
"""

import csv
import datetime
from pathlib import Path

import numpy as np

N_USERS, N_ITEMS, N_TOPICS, N_MONTHS = 3000, 600, 6, 12
FOLLOW_SHARE = 0.4
"""How often a user continues a series."""
FOLLOWED = (0.4, 0.3, 0.3)
"""Probabilities that it is the series of the last item, of the one before it, and of the one before that."""
STEPS = (0.3, 0.2, 0.15, 0.1, 0.1, 0.1, 0.05)
"""Probabilities of the items of that series: of the next one, of the one after it, and so on, round and round."""
TASTE = 0.1
"""Parameter of a Dirichlet distribution. With so small a one, a user has one or two topics."""
DRIFT = 0.6
"""Standard deviation of the logarithm of an item's popularity from one month to the next."""
MIN_EVENTS, MAX_EVENTS = 6, 60


def main() -> None:
    """Draw the events and write them."""
    rng = np.random.default_rng(0)

    # The law: who likes which topic, which items a topic has in each month, and which items are a series.
    taste_UT = rng.dirichlet(np.full(N_TOPICS, TASTE), N_USERS)
    popularity_I = (np.arange(N_ITEMS) + 5.0) ** -1.0
    drift_MI = np.exp(DRIFT * rng.standard_normal((N_MONTHS, N_ITEMS)).cumsum(0))
    topic_I = rng.integers(0, N_TOPICS, N_ITEMS)
    has_topic_TI = topic_I == np.arange(N_TOPICS)[:, None]
    topics_MTI = popularity_I * drift_MI[:, None] * has_topic_TI
    topics_MTI /= topics_MTI.sum(2, keepdims=True)
    follow_II = np.zeros((N_ITEMS, N_ITEMS))
    series = rng.permutation(N_ITEMS).reshape(-1, len(STEPS) + 1)
    for step, probability in enumerate(STEPS, 1):
        follow_II[series, np.roll(series, -step, axis=1)] = probability

    # Each user begins at some day of the year and continues to its end.
    lengths_U = np.exp(np.log(20) + 0.6 * rng.standard_normal(N_USERS)).clip(MIN_EVENTS, MAX_EVENTS).astype(int)
    begin_U = 300 * rng.random(N_USERS)
    days = [np.sort(rng.uniform(begin, 365, length)) for begin, length in zip(begin_U, lengths_U, strict=True)]

    # One event of each user after the other.
    last_U3 = np.zeros((N_USERS, len(FOLLOWED)), int)
    is_seen_UI = np.zeros((N_USERS, N_ITEMS), bool)
    events: list[tuple[float, int, int]] = []
    for place in range(MAX_EVENTS):
        users = np.flatnonzero(lengths_U > place)
        day = np.array([days[user][place] for user in users])
        month = (day * N_MONTHS / 365).astype(int)
        chance = np.empty((len(users), N_ITEMS))
        for number in range(N_MONTHS):
            chance[month == number] = taste_UT[users[month == number]] @ topics_MTI[number]
        if place >= len(FOLLOWED):
            follows = sum(share * follow_II[last_U3[users, n]] for n, share in enumerate(FOLLOWED))
            chance = FOLLOW_SHARE * follows + (1 - FOLLOW_SHARE) * chance
        chance[is_seen_UI[users]] = 0
        ends = chance.cumsum(1)
        items = (ends > rng.random((len(users), 1)) * ends[:, -1:]).argmax(1)
        last_U3[users] = np.column_stack([items, last_U3[users, :-1]])
        is_seen_UI[users, items] = True
        events += zip(day.tolist(), users.tolist(), items.tolist(), strict=True)

    with Path("events.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("user", "item", "time"))
        start = datetime.datetime(2025, 1, 1)
        for after_days, user, item in sorted(events):
            time = start + datetime.timedelta(days=after_days)
            writer.writerow((f"u{user:04}", f"item-{item:03}", time.isoformat(" ", "seconds")))
    print(f"events.csv: {len(events):,} events of {N_USERS:,} users and {N_ITEMS:,} items")


if __name__ == "__main__":
    main()
