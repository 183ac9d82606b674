// What net/ucx_api.hpp says of UCX's structures, against UCX's own header where
// there is one.

#if __has_include(<ucp/api/ucp.h>)

#include <ucp/api/ucp.h>

#include <cstddef>

#include "check.hpp"
#include "net/ucx_api.hpp"

namespace {

using namespace fusedpg;

TEST(ucx_structures_are_the_headers) {
#define SAME(ours, our_field, theirs, their_field) \
  CHECK_EQ(offsetof(ours, our_field), offsetof(theirs, their_field))
  SAME(ucx::Params, features, ucp_params_t, features);
  SAME(ucx::Params, mt_workers_shared, ucp_params_t, mt_workers_shared);
  SAME(ucx::WorkerParams, thread_mode, ucp_worker_params_t, thread_mode);
  SAME(ucx::EndpointParams, address, ucp_ep_params_t, address);
  SAME(ucx::EndpointParams, error_mode, ucp_ep_params_t, err_mode);
  SAME(ucx::EndpointParams, error_handler, ucp_ep_params_t, err_handler);
  SAME(ucx::RequestParam, flags, ucp_request_param_t, flags);
  SAME(ucx::RequestParam, callback, ucp_request_param_t, cb);
  SAME(ucx::RequestParam, user_data, ucp_request_param_t, user_data);
  SAME(ucx::RequestParam, receive_info, ucp_request_param_t, recv_info);
  SAME(ucx::ReceiveInfo, length, ucp_tag_recv_info_t, length);
#undef SAME
  CHECK(sizeof(ucx::Params) >= sizeof(ucp_params_t));
  CHECK(sizeof(ucx::WorkerParams) >= sizeof(ucp_worker_params_t));
  CHECK(sizeof(ucx::EndpointParams) >= sizeof(ucp_ep_params_t));
  CHECK(sizeof(ucx::RequestParam) >= sizeof(ucp_request_param_t));
  CHECK_EQ(sizeof(ucx::Status), sizeof(ucs_status_t));
  CHECK_EQ(ucx::kBusy, static_cast<ucx::Status>(UCS_ERR_BUSY));
  CHECK_EQ(
      ucx::kTruncated, static_cast<ucx::Status>(UCS_ERR_MESSAGE_TRUNCATED));
  CHECK_EQ(ucx::kNoElement, static_cast<ucx::Status>(UCS_ERR_NO_ELEM));
  CHECK_EQ(ucx::Params().features, UCP_FEATURE_TAG | UCP_FEATURE_WAKEUP);
  CHECK_EQ(
      ucx::Params().field_mask,
      UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_MT_WORKERS_SHARED);
  CHECK_EQ(ucx::WorkerParams().thread_mode, int(UCS_THREAD_MODE_SERIALIZED));
  CHECK_EQ(ucx::EndpointParams().error_mode, int(UCP_ERR_HANDLING_MODE_PEER));
  CHECK_EQ(ucx::RequestParam::kCallback, uint32_t(UCP_OP_ATTR_FIELD_CALLBACK));
  CHECK_EQ(ucx::RequestParam::kUserData, uint32_t(UCP_OP_ATTR_FIELD_USER_DATA));
  CHECK_EQ(ucx::RequestParam::kFlags, uint32_t(UCP_OP_ATTR_FIELD_FLAGS));
  CHECK_EQ(
      ucx::RequestParam::kReceiveInfo, uint32_t(UCP_OP_ATTR_FIELD_RECV_INFO));
  CHECK_EQ(ucx::RequestParam::kForce, uint32_t(UCP_EP_CLOSE_FLAG_FORCE));
}

} // namespace

#endif
