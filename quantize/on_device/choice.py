"""Whether a device can do what `--device` asks of it. Imports torch only to ask it."""

from kizami.formats.errors import KizamiError
from kizami.quantize.calibrated.solver import require_torch
from kizami.quantize.on_device.names import numbers_of
from kizami.quantize.plan import Plan
from kizami.quantize.settings import GIVEN


def check_device(plan: Plan, device: str) -> None:
    """KizamiError "bad_option" for one that the method does not use, "missing_torch", "bad_device" for one that is not
    there or rounds otherwise. Nothing is computed elsewhere than was asked for."""
    numbers = numbers_of(device)
    if numbers is None:
        return
    name = plan.method.name
    if name in GIVEN:
        raise KizamiError(
            f"--device {device} with --method {name}, whose engine chooses its device itself",
            code="bad_option",
            hint="leave --device out",
        )
    if not any(step.action == "quantize" for step in plan.steps):
        raise KizamiError(
            f"--device {device}, and nothing is rounded to INT4; the rest is computed on CPUs",
            code="bad_option",
            hint="leave --device out",
        )
    if name == "gptq" and len(numbers) > 1:
        raise KizamiError(
            f"--device {device} with --method gptq, which solves on one device",
            code="bad_option",
            hint=f"--device cuda:{numbers[0]}; --shards splits gptq over processes",
        )
    if name == "gptq":
        require_torch()
    else:
        require_torch(f"--device {device}", "--device cpu needs none")
    numbers = _there(device, numbers)
    if name != "gptq":
        _try(numbers, plan)


def _try(numbers: tuple[int, ...], plan: Plan) -> None:
    import torch

    from kizami.quantize.on_device.probe import try_device

    for number in numbers:
        try_device(torch.device("cuda", number), plan.method, plan.policy.group_size)


def _there(device: str, numbers: tuple[int, ...]) -> tuple[int, ...]:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        raise KizamiError(
            f'"{device}" cannot be used: torch {torch.__version__} finds no CUDA device',
            code="bad_device",
            hint="use --device cpu",
        )
    absent = [number for number in numbers if number >= count]
    if absent:
        raise KizamiError(
            f'"{device}" cannot be used: torch finds {count} CUDA devices, numbered from 0',
            code="bad_device",
            hint="--device cuda takes all of them",
        )
    return numbers or tuple(range(count))
