"""Pretends to be another processor: in every process with this folder in PYTHONPATH, torch's matrix products,
convolutions, attention, softmax and layer norms round by the shapes of their inputs. Equal inputs of equal shapes give
equal bits, as on every processor; another number of rows gives other last bits, as on most.

    PYTHONPATH=$PWD/tests/support/other_rounding make test-numbers
"""

import functools
import importlib.util
import sys
import warnings

KERNELS = (
    "mm addmm bmm baddbmm mv addmv dot convolution native_layer_norm _softmax _log_softmax "
    "_scaled_dot_product_flash_attention_for_cpu"
)


class OtherRounding:
    """Finds torch as usual, and changes its kernels once it is imported."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def load_and_change(module):
            load(module)
            change_kernels(module)

        spec.loader.exec_module = load_and_change
        return spec


def change_kernels(torch):
    library = torch.library.Library("aten", "IMPL")

    @functools.cache
    def noise(shapes, dtype, columns):
        """A factor near 1 for each column: 0 or one unit in the last place up or down, rarely in half precision, whose
        products are summed in float32."""
        generator = torch.Generator().manual_seed(sum(hash(shape) for shape in shapes) % 2**31)
        drawn = torch.randint(-32, 33, (columns,), generator=generator)
        half = dtype in (torch.bfloat16, torch.float16)
        sign = drawn.sign() * (drawn.abs() > (31 if half else 10))
        unit = torch.finfo(dtype).eps / (2 if half else 1)
        return 1 + unit * sign.to(torch.float64 if dtype == torch.float64 else torch.float32)

    def rounded(tensor, shapes):
        if tensor is None or not tensor.is_floating_point() or not tensor.numel():
            return tensor
        columns = tensor.shape[-1] if tensor.dim() else 1
        factor = noise(shapes, tensor.dtype, columns)
        other = (tensor * factor.reshape(tensor.shape[-1:])).to(tensor.dtype)
        return torch.where(tensor == tensor.round(), tensor, other)  # whole numbers are exact on every processor

    def change(name):
        kernel = torch.library.get_kernel(f"aten::{name}", "CPU")

        def call(keys, *args, **kwargs):
            shapes = tuple(tuple(arg.shape) for arg in args if isinstance(arg, torch.Tensor))
            result = kernel.call_boxed(keys, *args, **kwargs)
            if isinstance(result, tuple):
                return (rounded(result[0], shapes), *result[1:])
            return rounded(result, shapes)

        library.impl(name, call, "CPU", with_keyset=True)

    with warnings.catch_warnings(action="ignore"):  # that kernels are replaced
        for name in KERNELS.split():
            change(name)
    torch._other_rounding = library  # kernels last as long as their library


sys.meta_path.insert(0, OtherRounding())
