// What the parts of the device share that know torch.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include "runtime.h"

namespace phantom {

void register_backend();
// Tests that need no accelerator can be told that there is none.
bool available();
void set_available(bool value);

StreamPtr from_torch(const c10::Stream& stream);
c10::Allocator* device_memory();
c10::Allocator* pinned_memory();
// The bytes that both sizes have are kept.
void resize_storage(const c10::Storage& storage, size_t bytes);

}  // namespace phantom
