"""What limited each replica in the time, by the rules of the diagnosis, from what lines counted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvledger.books.load_lines import FORECAST, MIXTURES, PHASES, PREEMPTIONS, WAITS
from kvledger.diagnosis.counts import Counts, EngineCounts, PoolCounts
from kvledger.diagnosis.diagnosis import Diagnosis
from kvledger.diagnosis.findings import findings
from kvledger.diagnosis.observation import observe
from kvledger.diagnosis.setup_facts import setup_from
from kvledger.machine.utilization import ProcessorTimes
from kvledger.report.recorded import ReplicaRecord
from kvledger.report.steps import Steps

_PHASE = ("steps", "time", "tokens", "keys", "sequences")
# Classes of batches: 1, 2, 4, ... sequences.
_BATCHES = 13


def diagnosis_of(record: ReplicaRecord) -> Diagnosis | None:
    """None where the lines do not say what steps did, or what they were done with."""
    setup = setup_from(record.facts)
    if setup is None or not record.load.covered:
        return None
    try:
        seen = observe(setup, _counts(record))
        # Predictions need sums that the files do not have.
        return Diagnosis(seen, findings(seen), [])
    except OverflowError:  # numbers that no machine counts
        return None


def _counts(record: ReplicaRecord) -> Counts:
    load, states = record.load, record.states
    traffic = replace(
        record.traffic,
        requests=load.came,
        refused=load.refused,
        reusable_tokens=load.reusable_tokens,
        open_time=load.open_time,
        waiting_time=load.waiting_time,
        held_time=load.held_time,
        delayed_time=load.delayed_time,
    )
    batches = [load.batches.get(1 << number, Steps()).row for number in range(_BATCHES)]
    return Counts(
        at=load.covered,
        phases=np.array(
            [[load.phases[name][each] for each in _PHASE] for name in PHASES], np.int64
        ),
        mixtures=np.array([load.mixtures[name].row for name in MIXTURES], np.int64),
        batches=np.array(batches, np.int64),
        forecast=np.array([load.forecast[name] for name in FORECAST], np.int64),
        fits=np.zeros((len(PHASES), 9)),
        preemptions=np.array([load.preemptions[name] for name in PREEMPTIONS], np.int64),
        waited=np.array([load.waited[name] for name in WAITS], np.int64),
        engine=EngineCounts(load.step_time, load.forward_time, load.sampling_time),
        pool=PoolCounts(**{name: states[name] for name in vars(PoolCounts(0, 0, 0, 0, 0))}),
        processors=ProcessorTimes(0, 0, 0),
        traffic=traffic,
    )
