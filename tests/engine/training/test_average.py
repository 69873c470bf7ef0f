import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel as TorchAveragedModel

from fastgpu.training.average import AveragedModel


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2))


def test_average_is_that_of_torch_with_warm_up():
    def formula(average: Tensor, value: Tensor, n: Tensor) -> Tensor:
        decay = min(0.6, int(n) / (int(n) + 9))
        return decay * average + (1 - decay) * value if value.is_floating_point() else value  # counters are copied

    model = make_model()
    averages = [AveragedModel(model, 0.6), TorchAveragedModel(model, avg_fn=formula, use_buffers=True)]
    for _ in range(20):
        for tensor in model.state_dict().values():
            tensor.copy_(torch.rand(tensor.shape) if tensor.is_floating_point() else tensor + 1)
        for average in averages:
            average.update_parameters(model)
    ours, theirs = (dict(average.state_dict()) for average in averages)
    torch.testing.assert_close(ours, theirs)
    assert not torch.equal(ours["module.0.weight"], model[0].weight)


def test_average_of_equal_weights_does_not_drift():
    model = make_model()
    average = AveragedModel(model, 0.9)
    for _ in range(30):
        average.update_parameters(model)
    assert all(map(torch.equal, average.module.state_dict().values(), model.state_dict().values()))


def test_average_is_an_untrained_copy():
    model = make_model().to(memory_format=torch.channels_last)
    average = AveragedModel(model, 0.9)
    assert average.module[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert not any(parameter.requires_grad for parameter in average.parameters())
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert AveragedModel(model, 0.0).module is model
