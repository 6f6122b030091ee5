// File: load_model.h - the model that an evaluation runs.
#ifndef PALU_APPS_EVAL_LOAD_MODEL_H_
#define PALU_APPS_EVAL_LOAD_MODEL_H_

#include <memory>

#include "eval/options.h"
#include "llama/model.h"

namespace palu::app {

// The model of the options, for their context. With --weights f32 its weights are expanded into a
// temporary file, which is gone when this returns. Errors: FormatError (those of Model::Load; no
// room for the file).
std::shared_ptr<const llama::Model> LoadEvalModel(const EvalOptions& options);

}  // namespace palu::app

#endif  // PALU_APPS_EVAL_LOAD_MODEL_H_
