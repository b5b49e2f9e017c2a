"""The ways a command may stop short. Each prints one sentence and writes nothing further."""


class BadInput(Exception):
    """Exit code 2: what was expected, what came, and what to do, in one sentence."""


class BudgetRefused(Exception):
    """Exit code 3: the workload does not fit the budget, or a mechanism was never declared."""


class TeamBroken(Exception):
    """Exit code 4: another process of the same run has ended; the run can be resumed."""
