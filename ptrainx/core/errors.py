"""Every error that ptrainx raises on purpose.

    PtrainxError
    ├── MeshError            a mesh that can't be built, is missing, or meets another mesh
    ├── SpecError            a partition spec that does not fit its value or its mesh
    ├── TreeError            trees that do not match; a leaf or a class that is not known
    ├── InputError           a bad argument: shape, dtype, value; inputs that differ between ranks
    ├── TraceError           code that cannot be part of a traced step
    │   ├── HostReadError        a traced value was read on the host (`.item()`, `if tensor:`)
    │   ├── MutationError        an argument or a captured value was written in place
    │   └── RandomnessError      randomness without a key
    ├── GradientError        something that has no gradient: a vector, integers
    ├── DonationError        a donated value was used again, or one buffer was donated twice
    ├── AgreementError       ranks that disagree about the program, or never came
    ├── PassError            a pass of the compiler changed a result
    ├── ScheduleError        a pipeline's schedule that can't be run
    ├── HyperparameterError  an optimizer or schedule setting out of range
    ├── DataError            a data source that is missing, empty or malformed
    ├── CheckpointError      a checkpoint that can't be written or found; a rank that died while one was written
    │   ├── CheckpointDamageError    its files are not as they were written
    │   └── CheckpointMismatchError  it holds other leaves than were asked for
    ├── WorkerError          a worker process failed
    └── BackendError         a backend, device or optional package that is not available

A message has one form: what is wrong and where, then `got`, `expected` and `fix` lines, as far as each applies.
"""

from __future__ import annotations

__all__ = [
    "AgreementError",
    "BackendError",
    "CheckpointDamageError",
    "CheckpointError",
    "CheckpointMismatchError",
    "DataError",
    "DonationError",
    "GradientError",
    "HostReadError",
    "HyperparameterError",
    "InputError",
    "MeshError",
    "MutationError",
    "PassError",
    "PtrainxError",
    "RandomnessError",
    "ScheduleError",
    "SpecError",
    "TraceError",
    "TreeError",
    "WorkerError",
]


class PtrainxError(Exception):
    """Base of all errors of this library.

    Args:
        problem: what is wrong, one sentence, starting with where (function, argument path) if that is known.
        got: what was found.
        expected: what would have been right.
        fix: what to do, as an instruction.
        source: `file:line` of the user's code, where known.
    """

    def __init__(
        self,
        problem: str,
        *,
        got: str | None = None,
        expected: str | None = None,
        fix: str | None = None,
        source: str | None = None,
    ):
        self.problem, self.got, self.expected, self.fix, self.source = problem, got, expected, fix, source
        rows = (("at", source), ("got", got), ("expected", expected), ("fix", fix))
        lines = [problem, *(f"  {name + ':':<10}{text}" for name, text in rows if text)]
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple:
        # Exceptions travel between processes; the default would call __init__ with the finished message.
        return _rebuild, (type(self), self.problem, self.got, self.expected, self.fix, self.source)


def _rebuild(cls, problem, got, expected, fix, source):  # type: ignore[no-untyped-def]
    return cls(problem, got=got, expected=expected, fix=fix, source=source)


class MeshError(PtrainxError, ValueError): ...


class SpecError(PtrainxError, ValueError): ...


class TreeError(PtrainxError, TypeError): ...


class InputError(PtrainxError, ValueError): ...


class TraceError(PtrainxError, RuntimeError): ...


class HostReadError(TraceError): ...


class MutationError(TraceError): ...


class RandomnessError(TraceError): ...


class GradientError(PtrainxError, TypeError): ...


class DonationError(PtrainxError, RuntimeError): ...


class AgreementError(PtrainxError, RuntimeError): ...


class PassError(PtrainxError, RuntimeError): ...


class ScheduleError(PtrainxError, ValueError): ...


class HyperparameterError(PtrainxError, ValueError): ...


class DataError(PtrainxError, ValueError): ...


class CheckpointError(PtrainxError, RuntimeError): ...


class CheckpointDamageError(CheckpointError):
    def __init__(self, problem: str, *, fix: str | None = None, **parts: str | None):
        way_out = "restore an earlier step, as Manager.restore() does by itself, or bring the files from a good copy"
        super().__init__(problem, fix=fix or way_out, **parts)


class CheckpointMismatchError(CheckpointError): ...


class WorkerError(PtrainxError, RuntimeError): ...


class BackendError(PtrainxError, RuntimeError): ...
