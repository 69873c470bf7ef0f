import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel as TorchAveragedModel

from fastgpu.training.average import AveragedModel


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2))


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


def test_the_average_is_that_of_the_formula_and_initial_weights_do_not_count():
    model = make_model()
    average = AveragedModel(model, 0.5)
    expected: dict[str, torch.Tensor] = {}
    for n in range(20):
        decay = min(0.5, n / (n + 9))
        for name, value in model.state_dict().items():
            if value.is_floating_point():
                value.copy_(torch.rand(value.shape))
                expected[name] = decay * expected.get(name, 0) + (1 - decay) * value
            else:
                expected[name] = value.add_(1).clone()  # counters are copied
        average.update_parameters(model)
        assert same(average.module, model) == (n == 0)
    for name, value in average.module.state_dict().items():
        torch.testing.assert_close(value, expected[name])
    constant = AveragedModel(model, 0.9)  # frozen layers, and constants such as a mean, do not drift
    for _ in range(30):
        constant.update_parameters(model)
    assert same(constant.module, model)


def test_it_is_a_copy_with_the_same_layout_that_is_not_trained_and_without_decay_the_model_itself():
    model = make_model().to(memory_format=torch.channels_last)
    average = AveragedModel(model, 0.9)
    assert average.module[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert not any(parameter.requires_grad for parameter in average.parameters())
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert average.state_dict().keys() == TorchAveragedModel(model).state_dict().keys()
    assert AveragedModel(model, 0.0).module is model
