#include <vector>

#include "kernels/kernels.h"

namespace palu {

const KernelTable& Active() { return Reference(); }

std::vector<const KernelTable*> AllKernels() { return {&Reference()}; }

}  // namespace palu
