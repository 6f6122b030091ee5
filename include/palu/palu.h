// File: palu.h - everything public in one include.
#ifndef PALU_PALU_H_
#define PALU_PALU_H_

#include "palu/builder.h"
#include "palu/cache.h"
#include "palu/calibration.h"
#include "palu/cell_cache.h"
#include "palu/config.h"
#include "palu/errors.h"
#include "palu/methods.h"
#include "palu/rope.h"
#include "palu/spectrum.h"
#include "palu/tensor.h"

#endif  // PALU_PALU_H_
