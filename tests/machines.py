"""How state machines of hypothesis are run."""

from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test


def run_machine(machine: type[RuleBasedStateMachine], case: object, times: int) -> None:
    """Runs a machine with its attribute `case` so many times, thirty operations each."""
    run_state_machine_as_test(
        type("Machine", (machine,), {"case": case}),
        settings=settings(
            max_examples=times,
            stateful_step_count=30,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
