#include "collective_cases.hpp"
#include "host/mailbox.hpp"
using namespace fusedpg;
using namespace fusedpg::test;
TEST(scratch_mail_failure_mid_collective) {
  int wrong = 0, okay = 0;
  for (int round = 0; round < 40; ++round) {
    on_threads(2, [&](int rank, Store& store) {
      Group g(rank, 2, store);
      Mailbox mail(g.engine.domain(), *kernels::table());
      const size_t n = 4000000;
      auto* x = static_cast<float*>(g.engine.domain().arena()->allocate(n * 4));
      std::fill(x, x + n, 1.0f);
      store.meet("go", 2);
      char c;
      if (rank == 0) mail.receive(&c, 1, 1, 0, milliseconds(20 + round % 10), [](auto, int) {});
      float v = 1;
      try {
        for (int i = 0; i < 60; ++i) {
          g.run([&](Context& ctx) { all_reduce(ctx, {{x, n}}, sum_of()); }, milliseconds(5000));
          v *= 2;
          bool bad = false;
          for (size_t k = 0; k < n; k += 64) bad = bad || x[k] != v;
          if (bad) { size_t nb=0, lo=n, hi=0; float val=0; for (size_t k=0;k<n;++k) if (x[k]!=v) { ++nb; lo=std::min(lo,k); hi=k; val=x[k]; }
            std::cerr << "v " << v << " bad " << nb << " lo " << lo << " hi " << hi << " val " << val << " addr " << (void*)x << "\n"; std::cerr << "SILENT rank " << rank << " round " << round << " i " << i << " failed=" << g.engine.domain().failed() << "\n"; ++wrong; break; } else ++okay;
        }
      } catch (const Error& e) { }
      store.meet("end", 2);
    });
  }
  std::cerr << "wrong " << wrong << " ok " << okay << "\n";
}
