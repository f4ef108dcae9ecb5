// Records operations into a program. Cold calls: they check every size, so that running needs no checks.
//
// All views are of memory for the program's max_rows (or max_logits) rows of floats, one row after the other.
// Every method throws std::invalid_argument for memory that is too small or types that do not fit.
#pragma once
#include <memory>
#include <vector>

#include "cache/expert_table.h"
#include "cards/program.h"
#include "ops/activations.h"
#include "ops/experts.h"
#include "ops/rotary.h"
#include "ops/route.h"
#include "ops/router.h"

namespace tandem {

// Weights in memory, checked: [rows, columns] of a GGUF type.
struct Matrix {
    View memory;
    Weights weights;

    static Matrix in(const View& memory, uint32_t type_id, int64_t rows, int64_t columns);
};

// The width of the rows that a router takes, whose weights are float32 [width, experts].
int64_t router_width(const Matrix& weights);

// One matrix of every blob of a layer.
BlobMatrix blob_matrix(uint32_t type_id, size_t offset, int64_t rows, int64_t columns);

// One layer's keys and values in memory, checked.
struct KvMemory {
    View memory;
    KvLayer layer;

    static KvMemory in(const View& memory, KvType type, int num_heads, int head_dim, int64_t context);
};

// Rows of activations: floats, the memory of their quantised form (may be empty where the width is no multiple of 32), and that of
// each row's 1 / rms, which a norm fills (may be empty where nobody wants it).
struct RowsMemory {
    View values;
    View groups;
    int64_t width;
    View inverse;
};

class Recorder {
  public:
    Recorder(std::shared_ptr<Program> program, quant::Isa isa);

    // frequencies: radians per position, head_dim / 2 of them. out: [rows, head_dim].
    void angles(const std::vector<double>& frequencies, double magnitude, const View& out);
    void embed(const Matrix& table, const View& out);
    void norm(const View& x, const View& gamma, float eps, Rows rows, const RowsMemory& out);
    void quantise(const RowsMemory& rows);

    struct Product {
        Matrix matrix;
        View out;
        View residual;  // or empty
    };
    void matmul(const std::vector<Product>& products, const RowsMemory& x, Rows rows);

    struct Heads {
        View query;
        View key;
        View value;
        int query_heads;
        View query_gamma;  // or empty
        View key_gamma;    // or empty
        float eps;
        View angles;
    };
    void rotary(const Heads& heads, const KvMemory& kv);
    void attention(const View& query, int query_heads, const KvMemory& kv, float scale, const View& spans, const View& out);

    struct Gate {
        Gating gating;
        bool renormalise;
        float scale;
        int top_k;
    };
    // weights: float32 [width, experts]; sums: int64 [rows, experts].
    void router(const View& x, const View& gamma, const Matrix& weights, const View& sums);
    // x: the rows of the router's norm.
    void route(const View& sums, const RowsMemory& x, const Gate& gate, std::shared_ptr<ExpertTable> table, int layer,
               const View& routed);

    struct Expert {
        BlobMatrix gate;
        BlobMatrix up;
        BlobMatrix down;
    };
    // hidden: [rows * top_k, width]; expert_rows: [rows * top_k, hidden]; out: [rows, hidden], added to.
    void experts(const Expert& expert, const std::shared_ptr<ExpertTable>& table, int layer, int top_k, const View& routed,
                 const RowsMemory& x, const RowsMemory& hidden, const View& expert_rows, const View& out);

  private:
    // Checks that a view holds `num` values of T and keeps its memory alive.
    template <class T>
    T* part(const View& view, int64_t num, const char* what);
    quant::ActGroup* groups(const RowsMemory& rows, int64_t num_rows, const char* what);
    Activations activations(const RowsMemory& rows, int64_t num_rows, const char* what);
    int64_t most(Rows rows) const;

    std::shared_ptr<Program> program_;
    const quant::RowKernels* row_kernels_;
    const VectorKernels* vector_kernels_;
};

}  // namespace tandem
