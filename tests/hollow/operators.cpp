// Runs the operators of torch's CUDA build on the CPU, over the memory and in the order of the streams of runtime.cpp.
//
// Each operator of `aten` with a CUDA kernel gets another one. It calls the operator on CPU tensors that share the
// memory of the CUDA tensors. Copies between host and device, reads of a scalar and allocations stay torch's own, so
// that their calls of the CUDA runtime are the real ones.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/ops/copy_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <mutex>
#include <set>
#include <string>
#include <unordered_map>

using c10::IValue;
using torch::jit::Stack;

// Functions of runtime.cpp
struct HollowRange {
    const void* begin;
    size_t n_bytes;
    bool is_write;
};
static void* (*launch_begin)(void*, const char*, const HollowRange*, int);
static void (*launch_end)(void*);

// Operators whose CUDA kernels make the host wait, since the shape of the result depends on the values. An index with a
// mask is another one.
static const std::set<std::string> WAITING = {
    "aten::nonzero",  "aten::masked_select",      "aten::_unique2", "aten::unique_dim",
    "aten::bincount", "aten::unique_consecutive", "aten::equal",
};

// Operators of torch's CUDA build that are not replaced, beside those that return views.
static const std::set<std::string> KEPT = {
    "aten::copy_",           "aten::_local_scalar_dense",
    "aten::resize_",         "aten::resize_as_",
    "aten::record_stream",   "aten::is_pinned",
    "aten::_pin_memory",     "aten::pin_memory",
    "aten::is_set_to",       "aten::_to_copy",
    "aten::empty",           "aten::empty_strided",
    "aten::_fused_dropout",  "aten::_lazy_clone",
    "aten::_resize_output_", "aten::_has_compatible_shallow_copy_type",
};

// ---------------------------------------------------------------------------------------------- tensors

static size_t extent_bytes(const at::Tensor& tensor) {
    if (!tensor.numel()) return 0;
    size_t last = 0;
    for (int64_t dim = 0; dim < tensor.dim(); dim++) {
        last += (tensor.size(dim) - 1) * tensor.stride(dim);
    }
    return (last + 1) * tensor.element_size();
}

// A CPU tensor over the memory of a CUDA tensor.
static at::Tensor alias_on_cpu(const at::Tensor& tensor) {
    auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
    at::Tensor alias = at::empty_strided(tensor.sizes(), tensor.strides(), options);
    if (tensor.numel()) {
        auto keep = [](void*) {
        };
        alias = at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), keep, options);
    }
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) alias.unsafeGetTensorImpl()->set_wrapped_number(true);
    if (tensor.is_conj()) alias._set_conj(true);
    if (tensor.is_neg()) alias._set_neg(true);
    return alias;
}

static at::Tensor to_cuda(const at::Tensor& cpu, c10::Device device) {
    auto options = cpu.options().device(device);
    at::Tensor cuda = cpu.is_non_overlapping_and_dense() ? at::empty_strided(cpu.sizes(), cpu.strides(), options)
                                                         : at::empty(cpu.sizes(), options);
    if (cpu.numel()) alias_on_cpu(cuda).copy_(cpu);
    return cuda;
}

// The CPU generator that draws for a CUDA generator: it begins with its seed, so that a run on a "GPU" draws what a run
// on a CPU draws. It is seeded again when somebody sets seed or offset of the CUDA generator.
static at::Generator cpu_generator(const at::Generator& cuda) {
    struct Twin {
        at::Generator cpu;
        uint64_t seed;
        uint64_t offset;
    };
    static std::mutex mutex;
    static auto* twins = new std::unordered_map<c10::GeneratorImpl*, Twin>;
    std::lock_guard lock(mutex);
    auto* generator = at::check_generator<at::CUDAGeneratorImpl>(cuda);
    const uint64_t seed = generator->current_seed();
    const uint64_t offset = generator->get_offset();
    auto found = twins->find(generator);
    if (found == twins->end()) {
        found = twins->emplace(generator, Twin{at::detail::createCPUGenerator(seed), seed, offset}).first;
    }
    Twin& twin = found->second;
    if (twin.seed != seed || twin.offset != offset) {
        twin.cpu.set_current_seed(seed + offset);
        twin.seed = seed;
    }
    twin.offset = offset + 4;
    generator->set_offset(twin.offset);
    return twin.cpu;
}

// ---------------------------------------------------------------------------------------------- one call

// A call of an operator, with its arguments at the end of the stack. It is made on the CPU.
class Call {
  public:
    Call(const c10::OperatorHandle& op, Stack* stack)
        : op(op), schema(op.schema()), stack(stack), n_arguments(schema.arguments().size()) {
        originals.assign(stack->end() - n_arguments, stack->end());
    }

    void run() {
        const size_t first = stack->size() - n_arguments;
        for (size_t i = 0; i < n_arguments; i++) {
            convert_argument((*stack)[first + i], schema.arguments()[i]);
        }
        if (device && !device->has_index()) device = c10::Device(at::kCUDA, c10::cuda::current_device());
        c10::OptionalDeviceGuard guard(device);
        for (size_t i = 0; i < n_arguments; i++) {
            IValue& value = (*stack)[first + i];
            if (!device || !value.isNone() || schema.arguments()[i].name() != "generator") continue;
            value = IValue(cpu_generator(at::globalContext().defaultGenerator(*device)));
        }

        auto stream = c10::cuda::getCurrentCUDAStream(device ? device->index() : -1);
        const std::string name = schema.name().substr(strlen("aten::"));
        void* launched = launch_begin(stream.stream(), name.c_str(), ranges.data(), (int)ranges.size());
        try {
            op.callBoxed(stack);
        } catch (...) {
            launch_end(launched);
            throw;
        }
        launch_end(launched);

        fill_resized();
        const size_t first_return = stack->size() - schema.returns().size();
        for (size_t i = 0; i < schema.returns().size(); i++) {
            convert_return((*stack)[first_return + i], schema.returns()[i]);
        }
        if (WAITING.count(schema.name()) || has_mask) c10::cuda::stream_synchronize(stream.stream());
    }

  private:
    // An output without elements, which the operator gives its shape.
    struct Resized {
        at::Tensor cuda;
        at::Tensor cpu;
    };

    at::Tensor convert(const at::Tensor& tensor, bool is_write) {
        if (!tensor.defined() || !tensor.is_cuda()) return tensor;
        if (!device) device = tensor.device();
        at::Tensor alias = alias_on_cpu(tensor);
        if (is_write && !tensor.numel()) {
            resized.push_back({tensor, alias});
        } else {
            ranges.push_back({tensor.data_ptr(), extent_bytes(tensor), is_write});
        }
        return alias;
    }

    void convert_argument(IValue& value, const c10::Argument& argument) {
        const bool is_write = argument.alias_info() && argument.alias_info()->isWrite();
        if (value.isTensor()) {
            value = convert(value.toTensor(), is_write);
        } else if (value.isTensorList()) {
            c10::List<at::Tensor> list;
            for (const at::Tensor& each : value.toTensorVector()) {
                list.push_back(convert(each, is_write));
            }
            value = IValue(list);
        } else if (value.isOptionalTensorList()) {  // an index
            c10::List<std::optional<at::Tensor>> list;
            for (const std::optional<at::Tensor>& each : value.toOptionalTensorVector()) {
                const bool is_cuda = each && each->defined() && each->is_cuda();
                has_mask |= is_cuda && (each->scalar_type() == at::kBool || each->scalar_type() == at::kByte);
                list.push_back(each ? std::make_optional(convert(*each, false)) : each);
            }
            value = IValue(list);
        } else if (value.isDevice() && value.toDevice().is_cuda()) {
            if (!device) device = value.toDevice();
            value = IValue(c10::Device(at::kCPU));
        } else if (value.isGenerator() && value.toGenerator().device().is_cuda()) {
            if (!device) device = value.toGenerator().device();
            value = IValue(cpu_generator(value.toGenerator()));
        }
    }

    void fill_resized() {
        for (Resized& each : resized) {
            if (each.cpu.sizes() != each.cuda.sizes()) each.cuda.resize_(each.cpu.sizes());
            if (each.cpu.numel()) alias_on_cpu(each.cuda).copy_(each.cpu);
        }
    }

    void convert_return(IValue& value, const c10::Argument& result) {
        if (result.alias_info() && result.alias_info()->isWrite()) {
            // It is one of the arguments.
            for (size_t i = 0; i < n_arguments; i++) {
                const c10::AliasInfo* of_argument = schema.arguments()[i].alias_info();
                if (!of_argument || !of_argument->isWrite()) continue;
                if (of_argument->beforeSets() == result.alias_info()->beforeSets()) value = originals[i];
            }
        } else if (device && value.isTensor() && value.toTensor().defined() && value.toTensor().is_cpu()) {
            value = to_cuda(value.toTensor(), *device);
        } else if (device && value.isTensorList()) {
            c10::List<at::Tensor> list;
            for (const at::Tensor& each : value.toTensorVector()) {
                list.push_back(each.is_cpu() ? to_cuda(each, *device) : each);
            }
            value = IValue(list);
        }
    }

    const c10::OperatorHandle& op;
    const c10::FunctionSchema& schema;
    Stack* stack;
    const size_t n_arguments;
    std::vector<IValue> originals;
    std::vector<HollowRange> ranges;
    std::vector<Resized> resized;
    std::optional<c10::Device> device;  // of the first CUDA tensor
    bool has_mask = false;
};

static void run_on_cpu(const c10::OperatorHandle& op, Stack* stack) {
    Call(op, stack).run();
}

// Copies within a device and between two. All others are torch's.
static at::Tensor& copy(at::Tensor& to, const at::Tensor& from, bool non_blocking) {
    if (!to.is_cuda() || !from.is_cuda()) return at::native::copy_(to, from, non_blocking);
    auto stream = c10::cuda::getCurrentCUDAStream(from.device().index());
    auto other = c10::cuda::getCurrentCUDAStream(to.device().index());
    auto let_wait = [](c10::cuda::CUDAStream waiting, c10::cuda::CUDAStream first) {
        if (waiting == first) return;
        cudaEvent_t event;
        c10::DeviceGuard guard(first.device());
        cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
        cudaEventRecord(event, first.stream());
        guard.set_index(waiting.device_index());
        cudaStreamWaitEvent(waiting.stream(), event, 0);
        cudaEventDestroy(event);
    };
    c10::OptionalDeviceGuard guard(from.device());
    const HollowRange ranges[] = {
        {from.data_ptr(), extent_bytes(from), false},
        {to.data_ptr(), extent_bytes(to), true},
    };
    let_wait(stream, other);  // as torch does: the memory may still be in use by the other device
    void* launched = launch_begin(stream.stream(), "copy_", ranges, 2);
    try {
        if (to.numel()) alias_on_cpu(to).copy_(alias_on_cpu(from));
    } catch (...) {
        launch_end(launched);
        throw;
    }
    launch_end(launched);
    let_wait(other, stream);
    return to;
}

// ---------------------------------------------------------------------------------------------- SyncBatchNorm

// nn.SyncBatchNorm has operators that exist for GPUs only. Here they are formulas of other operators. N C ... is the
// shape of the input, W the number of ranks, and a mean or an inverse standard deviation has the shape (C) or (W, C).
namespace sync_batch_norm {

using at::Tensor;

// All axes but that of the channels.
static std::vector<int64_t> other_axes(const Tensor& input) {
    std::vector<int64_t> axes;
    for (int64_t axis = 0; axis < input.dim(); axis++) {
        if (axis != 1) axes.push_back(axis);
    }
    return axes;
}

// Values (C) that broadcast over the input.
static Tensor per_channel(const Tensor& values, const Tensor& input) {
    std::vector<int64_t> shape(input.dim(), 1);
    shape[1] = input.size(1);
    return values.view(shape);
}

static std::tuple<Tensor, Tensor> stats(const Tensor& input, double eps) {
    auto [variance, mean] = at::var_mean(input, other_axes(input), /*unbiased=*/false);
    return {mean, (variance + eps).rsqrt()};
}

static std::tuple<Tensor, Tensor> gather_stats(const Tensor&, const Tensor& mean_WC, const Tensor& invstd_WC,
                                               const std::optional<Tensor>& running_mean,
                                               const std::optional<Tensor>& running_var, double momentum, double eps,
                                               const Tensor& counts) {
    const Tensor share = (counts / counts.sum()).unsqueeze(1);
    const Tensor mean = (share * mean_WC).sum(0);
    const Tensor variance = (share * (invstd_WC.pow(-2) - eps + (mean_WC - mean).pow(2))).sum(0);
    if (running_mean && running_mean->defined()) {
        running_mean->lerp_(mean, momentum);
        running_var->lerp_(variance * counts.sum() / (counts.sum() - 1), momentum);
    }
    return {mean, (variance + eps).rsqrt()};
}

static Tensor normalize(const Tensor& input, const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                        const Tensor& mean, const Tensor& invstd, double) {
    Tensor output = (input - per_channel(mean, input)) * per_channel(invstd, input);
    if (weight && weight->defined()) output = output * per_channel(*weight, input);
    if (bias && bias->defined()) output = output + per_channel(*bias, input);
    return output;
}

static std::tuple<Tensor, Tensor, Tensor, Tensor> backward_reduce(const Tensor& grad, const Tensor& input,
                                                                  const Tensor& mean, const Tensor& invstd,
                                                                  const std::optional<Tensor>&, bool, bool, bool) {
    const Tensor sum = grad.sum(other_axes(input));
    const Tensor centred_sum = (grad * (input - per_channel(mean, input))).sum(other_axes(input));
    return {sum, centred_sum, centred_sum * invstd, sum.clone()};
}

static Tensor backward(const Tensor& grad, const Tensor& input, const Tensor& mean, const Tensor& invstd,
                       const std::optional<Tensor>& weight, const Tensor& sum, const Tensor& centred_sum,
                       const Tensor& counts) {
    const Tensor count = counts.sum();
    const Tensor slope = per_channel(invstd.pow(2) * centred_sum / count, input);
    Tensor output = grad - per_channel(sum / count, input) - (input - per_channel(mean, input)) * slope;
    output = output * per_channel(invstd, input);
    if (weight && weight->defined()) output = output * per_channel(*weight, input);
    return output;
}

}  // namespace sync_batch_norm

// ---------------------------------------------------------------------------------------------- registration

static bool is_kept(const c10::FunctionSchema& schema) {
    const std::string& name = schema.name();
    if (name.rfind("aten::", 0) != 0 || name.rfind("aten::set_", 0) == 0 || KEPT.count(name)) return true;
    for (const c10::Argument& each : schema.returns()) {
        if (each.alias_info() && !each.alias_info()->isWrite()) return true;  // a view
    }
    return false;
}

static bool runs_on_cpu(const c10::OperatorHandle& op) {
    using c10::DispatchKey;
    for (DispatchKey key :
         {DispatchKey::CPU, DispatchKey::CompositeExplicitAutograd, DispatchKey::CompositeImplicitAutograd,
          DispatchKey::CompositeExplicitAutogradNonFunctional}) {
        if (op.hasKernelForDispatchKey(key)) return true;
    }
    return false;
}

// runtime.cpp calls it when torch first asks for the number of devices.
extern "C" __attribute__((visibility("default"))) void hollow_install() {
    *(void**)&launch_begin = dlsym(RTLD_DEFAULT, "hollow_launch_begin");
    *(void**)&launch_end = dlsym(RTLD_DEFAULT, "hollow_launch_end");
    at::globalContext().setUserEnabledCuDNN(false);  // its operators have no code for CPUs

    auto& dispatcher = c10::Dispatcher::singleton();
    static auto* registered = new std::vector<c10::RegistrationHandleRAII>;
    auto replace = [&](const c10::OperatorName& name, c10::KernelFunction kernel) {
        registered->push_back(
            dispatcher.registerImpl(name, c10::DispatchKey::CUDA, std::move(kernel), std::nullopt, nullptr, "hollow"));
    };
    for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
        auto op = dispatcher.findSchema(name);
        if (!op || is_kept(op->schema()) || !runs_on_cpu(*op)) continue;
        // A convolution has no kernel of its own for CUDA, but it chooses one by the device of its arguments.
        const bool is_convolution = name.name == "aten::convolution" || name.name == "aten::convolution_overrideable";
        if (!is_convolution && !op->hasKernelForDispatchKey(c10::DispatchKey::CUDA)) continue;
        replace(name, c10::KernelFunction::makeFromBoxedFunction<&run_on_cpu>());
    }
    auto replace_one = [&](const char* name, auto* function) {
        replace({name, ""}, c10::KernelFunction::makeFromUnboxedRuntimeFunction(function));
    };
    replace_one("aten::copy_", &copy);
    replace_one("aten::batch_norm_stats", &sync_batch_norm::stats);
    replace_one("aten::batch_norm_gather_stats_with_counts", &sync_batch_norm::gather_stats);
    replace_one("aten::batch_norm_elemt", &sync_batch_norm::normalize);
    replace_one("aten::batch_norm_backward_reduce", &sync_batch_norm::backward_reduce);
    replace_one("aten::batch_norm_backward_elemt", &sync_batch_norm::backward);
}
