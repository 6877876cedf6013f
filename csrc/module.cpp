// The Python module: addresses, shapes and strides in, nothing out, but of lookups. Its callers check what they pass.
//
// What Python passes are the arguments of a function or the fields of a struct in their order: an address for a pointer.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <tuple>
#include <utility>

#include "blocks.hpp"
#include "convert.hpp"
#include "digest.hpp"
#include "thread_pool.hpp"
#include "expanded_packing.hpp"
#include "gather.hpp"
#include "lookup.hpp"
#include "packing.hpp"
#include "piece_merges.hpp"
#include "program.hpp"
#include "rotary_table.hpp"
#include "rounding.hpp"
#include "sampling.hpp"

namespace nb = nanobind;

namespace quire {
namespace {

// Where the first element of a NumPy array is; TypeError for anything else. The field behind an object's head is part of
// NumPy's ABI; asking for it by Python's protocols takes 1 to 6 microseconds, and a step asks for some twenty.
std::uintptr_t address(nb::handle array) {
    static PyObject* const type = nb::object(nb::module_::import_("numpy").attr("ndarray")).release().ptr();
    if (!PyObject_TypeCheck(array.ptr(), reinterpret_cast<PyTypeObject*>(type))) throw nb::type_error("no array of NumPy");
    struct Array {
        PyObject head;
        char* data;
    };
    return reinterpret_cast<std::uintptr_t>(reinterpret_cast<const Array*>(array.ptr())->data);
}

// Something passed by Python, as whatever it is wanted for.
struct Argument {
    nb::handle passed;

    template <typename Wanted>
    operator Wanted() const {
        if constexpr (std::is_pointer_v<Wanted>)
            return reinterpret_cast<Wanted>(nb::cast<std::uintptr_t>(passed));
        else if constexpr (std::is_same_v<Wanted, WeightFormat> || std::is_same_v<Wanted, KVFormat> || std::is_same_v<Wanted, BlockType> || std::is_same_v<Wanted, ValueType>)
            return static_cast<Wanted>(nb::cast<std::uint8_t>(passed));  // any tag: a kernel refuses unknown ones
        else
            return nb::cast<Wanted>(passed);
    }
};

template <typename>
using Passed = nb::handle;
template <std::size_t>
using PassedField = nb::handle;

// How many fields a struct has: as many as it can be made of.
struct Anything {
    template <typename Wanted>
    operator Wanted() const;
};

template <typename Struct, typename... Fields>
constexpr std::size_t num_fields() {
    if constexpr (requires { Struct{Fields{}..., Anything{}}; })
        return num_fields<Struct, Fields..., Anything>();
    else
        return sizeof...(Fields);
}

template <typename Result, typename... Wanted>
void def(nb::module_& module, const char* name, Result (*function)(Wanted...)) {
    module.def(name, [function](Passed<Wanted>... passed) { return function(Argument{passed}...); });
}

// Work of some milliseconds or more: other threads of Python go on.
template <typename Result, typename... Wanted>
void def_long(nb::module_& module, const char* name, Result (*function)(Wanted...)) {
    module.def(name, [function](Passed<Wanted>... passed) {
        const std::tuple<Wanted...> arguments{Argument{passed}...};
        const nb::gil_scoped_release others_run;
        return std::apply(function, arguments);
    });
}

template <typename Op>
void def_kernel(nb::module_& module, const std::string& name, auto kernel) {
    [&]<std::size_t... i>(std::index_sequence<i...>) {
        module.def(name.c_str(), [kernel](PassedField<i>... passed) { kernel(Op{Argument{passed}...}); });
    }(std::make_index_sequence<num_fields<Op>()>());
}

// A kernel that may wait for other ranks.
template <typename Op>
void with_other_threads(void (*kernel)(const Op&), const Op& op) {
    const nb::gil_scoped_release others_run;
    kernel(op);
}

// The chosen instruction set's kernels of an op.
template <template <typename> class Op>
void def(nb::module_& module, const std::string& name, ForBoth<Op> Kernels::*both) {
    def_kernel<Op<bf16>>(module, name + "_bf16", [both](const Op<bf16>& op) { (chosen->*both).bf16(op); });
    def_kernel<Op<float>>(module, name + "_float", [both](const Op<float>& op) { (chosen->*both).float32(op); });
}

template <typename Op>
void def(nb::module_& module, const char* name, void (*Kernels::*kernel)(const Op&)) {
    def_kernel<Op>(module, name, [kernel](const Op& op) { (chosen->*kernel)(op); });
}

template <typename Struct>
void def_struct(nb::module_& module, const char* name) {
    [&]<std::size_t... i>(std::index_sequence<i...>) {
        nb::class_<Struct>(module, name).def("__init__", [](Struct* self, PassedField<i>... passed) {
            new (self) Struct{Argument{passed}...};
        });
    }(std::make_index_sequence<num_fields<Struct>()>());
}

template <typename T>
void def_experts(nb::module_& module, const char* name) {
    module.def(name, [](Passed<T> x, long num_rows, long x_stride, Passed<T> scored, long scored_stride, Passed<T> out, long out_stride,
                        const ExpertWeights& weights) {
        const Experts<T> op{Argument{x}, num_rows, x_stride, Argument{scored}, scored_stride, Argument{out}, out_stride, weights};
        if constexpr (sizeof(T) == sizeof(bf16))
            chosen->experts.bf16(op);
        else
            chosen->experts.float32(op);
    }, nb::call_guard<nb::gil_scoped_release>());  // it may wait for other ranks
}

template <typename T>
void def_program(nb::module_& module, const char* name) {
    using Addresses = std::vector<std::uintptr_t>;
    const auto pointers = [](const Addresses& addresses) {
        std::vector<T*> pointers;
        for (std::uintptr_t address : addresses) pointers.push_back(reinterpret_cast<T*>(address));
        return pointers;
    };
    nb::class_<Program<T>> program(module, name);
    program.def(nb::init<std::vector<ProgramOp>, std::vector<Buffer>>());
    program.def("use_caches", &Program<T>::use_caches);
    program.def("start_timing", &Program<T>::start_timing);
    program.def("stop_timing", &Program<T>::stop_timing);
    [&]<std::size_t... i>(std::index_sequence<i...>) {
        program.def("run", [pointers](const Program<T>& self, const Addresses& externals, PassedField<i>... passed) {
            const ProgramStep step{Argument{passed}...};
            const std::vector<T*> rows = pointers(externals);
            const nb::gil_scoped_release others_run;
            self.run(step, rows);
        });
        program.def("run_with_adapters", [pointers](const Program<T>& self, const Addresses& externals,
                                                    const std::vector<const AdapterFactors*>& adapters, std::uintptr_t of_row,
                                                    PassedField<i>... passed) {
            const ProgramStep step{Argument{passed}...};
            const std::vector<T*> rows = pointers(externals);
            const nb::gil_scoped_release others_run;
            const StepAdapters<T> own(adapters, reinterpret_cast<const std::int32_t*>(of_row), step.num_tokens);
            self.run(step, rows, &own);
        });
    }(std::make_index_sequence<num_fields<ProgramStep>()>());
}

// Numbers of an int64 array [num] without gaps, read in place: an address of it would take Python longer than a lookup.
class Int64s {
public:
    explicit Int64s(nb::handle array) {
        if (PyObject_GetBuffer(array.ptr(), &view_, PyBUF_CONTIG_RO) != 0) throw nb::python_error();
        if (view_.itemsize == sizeof(std::int64_t) && view_.ndim == 1) return;
        PyBuffer_Release(&view_);
        throw std::invalid_argument("rows and positions are int64 [num]");
    }
    Int64s(const Int64s&) = delete;
    ~Int64s() { PyBuffer_Release(&view_); }

    const std::int64_t* begin() const { return static_cast<const std::int64_t*>(view_.buf); }
    long size() const { return static_cast<long>(view_.len / view_.itemsize); }

private:
    Py_buffer view_;
};

// Drafts as a dict of lists by row.
template <typename Lookup>
nb::dict draft(Lookup& lookup, nb::handle rows, nb::handle last) {
    const Int64s row_numbers(rows), positions(last);
    if (row_numbers.size() != positions.size()) throw std::invalid_argument("each row has one position");
    nb::dict drafts;
    for (const Draft& each : lookup.draft(row_numbers.begin(), positions.begin(), row_numbers.size()))
        drafts[nb::int_(each.row)] = nb::cast(each.tokens);
    return drafts;
}

// An exchange in Python, of addresses, as ColumnExchange and SumExchange call it. Its error ends the program that calls it.
struct PythonExchange {
    nb::object function;

    static void call(void* context, const void* own, void* rows, long num_rows, long kind) {
        const nb::gil_scoped_acquire held;
        const auto address = [](const void* memory) { return reinterpret_cast<std::uintptr_t>(memory); };
        static_cast<const PythonExchange*>(context)->function(address(own), address(rows), num_rows, kind);
    }
    static void gather(void* context, const void* own, void* rows, long num_rows, long element_bytes) {
        call(context, own, rows, num_rows, element_bytes);
    }
    static void sum(void* context, const float* own, void* out, long num_rows, bool out_is_float) {
        call(context, own, out, num_rows, out_is_float);
    }
};

// The address of a function that exchanges calls, and that of its context.
template <typename Context>
std::pair<std::uintptr_t, std::uintptr_t> addresses(auto* function, Context& context) {
    return {reinterpret_cast<std::uintptr_t>(function), reinterpret_cast<std::uintptr_t>(&context)};
}

void def_rank_group(nb::module_& module) {
    nb::exception<Interrupted>(module, "InterruptedExchangeError", PyExc_RuntimeError);
    using Released = nb::call_guard<nb::gil_scoped_release>;
    nb::class_<RankGroup>(module, "RankGroup")
        .def(nb::init<std::uintptr_t, long, long, long>())
        .def_ro_static("header_bytes", &RankGroup::header_bytes)
        .def("meet", &RankGroup::meet, Released())
        .def("interrupt", &RankGroup::interrupt, Released())
        .def("reset", &RankGroup::reset)
        .def("resume", &RankGroup::resume);
    nb::class_<PartialSum>(module, "PartialSum")
        .def("__init__", [](PartialSum* self, RankGroup& group, long width) {
            new (self) PartialSum{&group, width};
        }, nb::keep_alive<1, 2>())
        .def("address", [](PartialSum& self) { return addresses(&PartialSum::call, self); })
        .def("sum", [](PartialSum& self, std::uintptr_t own, std::uintptr_t out, long num_rows, bool out_is_float) {
            PartialSum::call(&self, reinterpret_cast<float*>(own), reinterpret_cast<void*>(out), num_rows, out_is_float);
        }, Released());
    nb::class_<ColumnGather>(module, "ColumnGather")
        .def("__init__", [](ColumnGather* self, RankGroup& group, std::vector<long> bounds) {
            new (self) ColumnGather{&group, std::move(bounds)};
        }, nb::keep_alive<1, 2>())
        .def("address", [](ColumnGather& self) { return addresses(&ColumnGather::call, self); })
        .def("gather", [](ColumnGather& self, std::uintptr_t own, std::uintptr_t rows, long num_rows, long element_bytes) {
            ColumnGather::call(&self, reinterpret_cast<void*>(own), reinterpret_cast<void*>(rows), num_rows, element_bytes);
        }, Released());
    nb::class_<PythonExchange>(module, "PythonExchange")
        .def("__init__", [](PythonExchange* self, nb::object function) { new (self) PythonExchange{std::move(function)}; })
        .def("gather_address", [](PythonExchange& self) { return addresses(&PythonExchange::gather, self); })
        .def("sum_address", [](PythonExchange& self) { return addresses(&PythonExchange::sum, self); });
}

}  // namespace
}  // namespace quire

NB_MODULE(_kernels, module) {
    using namespace quire;
    nb::set_leak_warnings(false);  // at the end of a process frozen objects and those of daemon threads are alive, and no leak
    nb::dict formats;
    formats["dense"] = static_cast<int>(WeightFormat::dense);
    formats["int8_a8"] = static_cast<int>(WeightFormat::int8_a8);
    formats["int4_a8"] = static_cast<int>(WeightFormat::int4_a8);
    formats["int8"] = static_cast<int>(WeightFormat::int8);
    formats["int4"] = static_cast<int>(WeightFormat::int4);
    formats["fp8"] = static_cast<int>(WeightFormat::fp8);
    formats["codebook4"] = static_cast<int>(WeightFormat::codebook4);
    module.attr("WEIGHT_FORMATS") = formats;
    nb::dict block_types;
    for (const auto& [name, type] : std::initializer_list<std::pair<const char*, BlockType>>{
             {"Q4_0", BlockType::q4_0}, {"Q4_1", BlockType::q4_1}, {"Q5_0", BlockType::q5_0}, {"Q5_1", BlockType::q5_1},
             {"Q8_0", BlockType::q8_0}, {"Q4_K", BlockType::q4_k}, {"Q5_K", BlockType::q5_k}, {"Q6_K", BlockType::q6_k},
             {"IQ4_NL", BlockType::iq4_nl}, {"IQ4_XS", BlockType::iq4_xs}, {"MXFP4", BlockType::mxfp4}})
        block_types[name] = static_cast<int>(type);
    module.attr("BLOCK_TYPES") = block_types;
    nb::dict value_types;
    for (const auto& [name, type] : std::initializer_list<std::pair<const char*, ValueType>>{
             {"float64", ValueType::float64}, {"float32", ValueType::float32}, {"float16", ValueType::float16},
             {"bfloat16", ValueType::bfloat16}, {"float8_e4m3", ValueType::float8_e4m3}})
        value_types[name] = static_cast<int>(type);
    module.attr("VALUE_TYPES") = value_types;
    nb::enum_<Activation>(module, "Activation")
        .value("none", Activation::none)
        .value("silu_and_mul", Activation::silu_and_mul)
        .value("gelu_tanh", Activation::gelu_tanh)
        .value("gelu", Activation::gelu)
        .value("relu", Activation::relu)
        .value("relu2", Activation::relu2)
        .value("quick_gelu", Activation::quick_gelu)
        .value("gelu_and_mul", Activation::gelu_and_mul)
        .value("gelu_tanh_and_mul", Activation::gelu_tanh_and_mul)
        .value("clamped_silu_and_mul", Activation::clamped_silu_and_mul);
    nb::dict kv_formats;
    kv_formats["same"] = static_cast<int>(KVFormat::same);
    kv_formats["int8_scaled"] = static_cast<int>(KVFormat::int8_scaled);
    kv_formats["e4m3_scaled"] = static_cast<int>(KVFormat::e4m3_scaled);
    kv_formats["e4m3"] = static_cast<int>(KVFormat::e4m3);
    module.attr("KV_FORMATS") = kv_formats;
    def_struct<LayerCache>(module, "LayerCache");
    nb::enum_<Offsets>(module, "Offsets")
        .value("zero_point", Offsets::zero_point)
        .value("zero_points", Offsets::zero_points)
        .value("minimums", Offsets::minimums);
    def_struct<Quantization>(module, "Quantization");
    def_struct<NormWeights>(module, "NormWeights");
    def_struct<LinearWeights>(module, "LinearWeights");
    def_struct<ColumnExchange>(module, "ColumnExchange");
    def_struct<SumExchange>(module, "SumExchange");
    def_struct<Routing>(module, "Routing");
    def_struct<ExpertWeights>(module, "ExpertWeights");
    def_struct<Heads>(module, "Heads");
    def_struct<Buffer>(module, "Buffer");
    def_struct<NormOp>(module, "NormOp");
    def_struct<LinearOp>(module, "LinearOp");
    def_struct<LowRankPart>(module, "LowRankPart");
    def_struct<LowRankFactors>(module, "LowRankFactors");
    def_struct<AdapterFactors>(module, "AdapterFactors");
    def_struct<ExpertsOp>(module, "ExpertsOp");
    def_struct<QKNormOp>(module, "QKNormOp");
    def_struct<HeadNormOp>(module, "HeadNormOp");
    def_struct<RotaryParameters>(module, "RotaryParameters");
    def_struct<RotaryWriteOp>(module, "RotaryWriteOp");
    def_struct<AttentionParameters>(module, "AttentionParameters");
    def_struct<AttentionOp>(module, "AttentionOp");
    def_struct<ShortConvOp>(module, "ShortConvOp");
    def_struct<DeltaNetWeights>(module, "DeltaNetWeights");
    def_struct<DeltaNetOp>(module, "DeltaNetOp");
    def_struct<GateOp>(module, "GateOp");
    def_struct<NormSpan>(module, "NormSpan");
    def_struct<MambaWeights>(module, "MambaWeights");
    def_struct<MambaOp>(module, "MambaOp");
    def_struct<PositionScaleOp>(module, "PositionScaleOp");
    def_struct<SumOp>(module, "SumOp");
    def_struct<GatherOp>(module, "GatherOp");
    def_struct<SummedLinearOp>(module, "SummedLinearOp");
    def_struct<HeadLinearOp>(module, "HeadLinearOp");
    def_struct<CountLayerOp>(module, "CountLayerOp");
    def_rank_group(module);
    def_program<bf16>(module, "Program_bf16");
    def_program<float>(module, "Program_float");
    module.def("usable_isas", usable_isas);
    module.def("use_isa", use_isa);
    module.def("num_threads", num_threads);
    module.def("set_num_threads", set_num_threads);
    module.def("address", address);
    def(module, "packed_size_bf16", packed_size<bf16>);
    def(module, "packed_size_float", packed_size<float>);
    def_long(module, "pack_bf16", pack_linear<bf16>);
    def_long(module, "pack_float", pack_linear<float>);
    def(module, "quantized_size", quantized_size);
    def_long(module, "pack_quantized", pack_quantized);
    def(module, "expanded_size", expanded_size);
    def_long(module, "pack_expanded", pack_expanded);
    def(module, "look_up_packed_bf16", look_up_packed<bf16>);
    def(module, "look_up_packed_float", look_up_packed<float>);
    def(module, "look_up_quantized", look_up_quantized);
    def(module, "look_up_expanded", look_up_expanded);
    def_long(module, "read_blocks", read_blocks);
    def_long(module, "copy_blocks", copy_blocks);
    def_long(module, "read_block_values", read_block_values);
    def(module, "look_up_blocks", look_up_blocks);
    def_long(module, "convert", convert);
    def_long(module, "digest", digest);
    def_long(module, "read_file", read_file);
    def_long(module, "round_to_nearest", round_to_nearest);
    def_long(module, "rotary_table", rotary_table);
    def_long(module, "piece_merges", piece_merges);
    def_long(module, "all_finite_bf16", all_finite<bf16>);
    def_long(module, "all_finite_float", all_finite<float>);
    def(module, "linear", &Kernels::linear);
    def(module, "low_rank_product", &Kernels::low_rank_product);
    def_experts<bf16>(module, "experts_bf16");
    def_experts<float>(module, "experts_float");
    def(module, "rms_norm", &Kernels::rms_norm);
    def(module, "layer_norm", &Kernels::layer_norm);
    def(module, "embedding", &Kernels::embedding);
    def(module, "attention", &Kernels::attention);
    def(module, "kv_write", &Kernels::kv_write);
    def(module, "short_conv", &Kernels::short_conv);
    def(module, "delta_net", &Kernels::delta_net);
    def(module, "gate", &Kernels::gate);
    def_kernel<Mamba<bf16>>(module, "mamba_bf16", [](const Mamba<bf16>& op) { with_other_threads(chosen->mamba.bf16, op); });
    def_kernel<Mamba<float>>(module, "mamba_float", [](const Mamba<float>& op) { with_other_threads(chosen->mamba.float32, op); });
    def(module, "choose_tokens", &Kernels::choose_tokens);
    def(module, "mask_logits", &Kernels::mask_logits);
    def(module, "top_logprobs", &Kernels::top_logprobs);
    def(module, "swap_blocks", swap_blocks);
    def(module, "draw_uniforms", draw_uniforms);
    def_kernel<Penalties>(module, "penalize", penalize);
    def_struct<Rows>(module, "Rows");
    def_struct<SuffixRules>(module, "SuffixRules");
    nb::class_<NgramLookup>(module, "NgramLookup")
        .def(nb::init<Rows, long, long>())
        .def("reset", &NgramLookup::reset)
        .def("draft", draft<NgramLookup>);
    nb::class_<SuffixLookup>(module, "SuffixLookup")
        .def(nb::init<Rows, SuffixRules>())
        .def("reset", &SuffixLookup::reset)
        .def("clear", &SuffixLookup::clear)
        .def("draft", draft<SuffixLookup>);
    def_long(module, "fail_in_chunk", fail_in_chunk);
}
