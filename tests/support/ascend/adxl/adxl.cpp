// A stand-in for CANN's ADXL (libllm_datadist.so), by which Mooncake's transport for Ascend reaches peers: processes of
// this machine, whose memory is read through the kernel. Like HCCS it registers device memory at multiples of 2 MiB only,
// 256 regions at most, and reads no host memory of a peer. Like HIXL it registers no two regions that overlap, reads what
// both sides had registered when the link was made, and ends the link when a read fails. Like CANN from 9.1.0 on it offers
// client-server mode, which both sides must be in. SIMADXL_DIR is where engines find each other; without it, those of one
// user do. SIMADXL_LINK_MS is how long the link takes that HIXL makes within the first read of a peer: one at a time, and
// given up after the read's timeout.

#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <chrono>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

namespace ge {
class AscendString {
 public:
  AscendString(const char *name);
  bool operator<(const AscendString &other) const;
  std::shared_ptr<std::string> name_;
};
AscendString::AscendString(const char *name) : name_(std::make_shared<std::string>(name)) {}
bool AscendString::operator<(const AscendString &other) const { return *name_ < *other.name_; }
}  // namespace ge

namespace adxl {
using Status = uint32_t;
using ge::AscendString;
constexpr Status SUCCESS = 0, PARAM_INVALID = 103900, NOT_CONNECTED = 103902, FAILED = 503900, EXHAUSTED = 203900;
enum FeatureType : int32_t { AUTO_CONNECT, CLIENT_SERVER_COMM };
enum MemType { MEM_DEVICE, MEM_HOST };
enum TransferOp { READ, WRITE };
struct MemDesc {
  uintptr_t addr;
  size_t len;
  uint8_t reserved[128];
};
struct TransferOpDesc {
  uintptr_t local_addr, remote_addr;
  size_t len;
};

struct Region {
  uintptr_t addr;
  size_t len;
  MemType type;
  bool holds(uintptr_t start, size_t size) const { return start >= addr && start + size <= addr + len; }
};

using Regions = std::map<uintptr_t, Region>;

static bool holds(const Regions &regions, uintptr_t start, size_t size) {
  for (auto &[addr, region] : regions)
    if (region.type == MEM_DEVICE && region.holds(start, size)) return true;
  return false;
}

static std::string file_of(const AscendString &name) {
  const char *set = getenv("SIMADXL_DIR");
  std::string directory = set ? set : "/tmp/simulated-adxl-" + std::to_string(geteuid());
  mkdir(directory.c_str(), 0700);
  return directory + "/" + *name.name_;
}

struct Link {
  pid_t pid;
  Regions ours, theirs;
};

struct Engine {
  std::mutex mutex, connecting;
  std::map<std::string, std::shared_ptr<Link>> links;
  std::string file;
  Regions regions;
  bool client_server = false;

  std::shared_ptr<Link> connect(const AscendString &peer, int32_t timeout_ms) {
    std::lock_guard<std::mutex> lock(connecting);
    auto &link = links[*peer.name_];
    if (link) return link;
    const char *set = getenv("SIMADXL_LINK_MS");
    int32_t takes_ms = set ? atoi(set) : 0;
    std::this_thread::sleep_for(std::chrono::milliseconds(takes_ms < timeout_ms ? takes_ms : timeout_ms));
    if (takes_ms >= timeout_ms) return nullptr;
    std::ifstream in(file_of(peer));
    auto made = std::make_shared<Link>();
    bool theirs_is_client_server;
    if (!(in >> made->pid >> theirs_is_client_server) || theirs_is_client_server != client_server) return nullptr;
    Region region;
    for (int type; in >> region.addr >> region.len >> type;) {
      region.type = static_cast<MemType>(type);
      made->theirs[region.addr] = region;
    }
    std::lock_guard<std::mutex> registering(mutex);
    made->ours = regions;
    return link = made;
  }

  void disconnect(const AscendString &peer) {
    std::lock_guard<std::mutex> lock(connecting);
    links.erase(*peer.name_);
  }

  void publish() {
    std::ofstream out(file + ".new");
    out << getpid() << " " << client_server << "\n";
    for (auto &[addr, region] : regions) out << addr << " " << region.len << " " << region.type << "\n";
    out.close();
    rename((file + ".new").c_str(), file.c_str());
  }
};

class AdxlEngine {
 public:
  AdxlEngine();
  ~AdxlEngine();
  static Status GetCapability(FeatureType, int32_t &);
  Status Initialize(const AscendString &, const std::map<AscendString, AscendString> &);
  void Finalize();
  Status RegisterMem(const MemDesc &, MemType, void *&);
  Status DeregisterMem(void *);
  Status Connect(const AscendString &, int32_t);
  Status Disconnect(const AscendString &, int32_t);
  Status TransferSync(const AscendString &, TransferOp, const std::vector<TransferOpDesc> &, int32_t);

 private:
  Engine *engine_;
};

AdxlEngine::AdxlEngine() : engine_(new Engine) {}
AdxlEngine::~AdxlEngine() {
  Finalize();
  delete engine_;
}

Status AdxlEngine::GetCapability(FeatureType, int32_t &value) {
  value = 1;
  return SUCCESS;
}

Status AdxlEngine::Initialize(const AscendString &name, const std::map<AscendString, AscendString> &options) {
  auto resources = options.find("adxl.LocalCommRes"), pool = options.find("adxl.BufferPool");
  engine_->client_server = resources != options.end() && resources->second.name_->find("1.3") != std::string::npos;
  if (engine_->client_server && pool != options.end() && *pool->second.name_ != "0:0") return PARAM_INVALID;
  engine_->file = file_of(name);
  engine_->publish();
  return SUCCESS;
}

void AdxlEngine::Finalize() {
  if (!engine_->file.empty()) unlink(engine_->file.c_str());
}

Status AdxlEngine::RegisterMem(const MemDesc &mem, MemType type, void *&handle) {
  std::lock_guard<std::mutex> lock(engine_->mutex);
  if (type == MEM_DEVICE && mem.addr % (2u << 20)) return PARAM_INVALID;
  if (engine_->regions.size() >= 256) return EXHAUSTED;
  for (auto &[addr, region] : engine_->regions)
    if (type == region.type && mem.addr < addr + region.len && addr < mem.addr + mem.len &&
        !(addr == mem.addr && region.len == mem.len))
      return PARAM_INVALID;
  engine_->regions[mem.addr] = {mem.addr, mem.len, type};
  engine_->publish();
  handle = reinterpret_cast<void *>(mem.addr);
  return SUCCESS;
}

Status AdxlEngine::DeregisterMem(void *handle) {
  std::lock_guard<std::mutex> lock(engine_->mutex);
  engine_->regions.erase(reinterpret_cast<uintptr_t>(handle));
  engine_->publish();
  return SUCCESS;
}

Status AdxlEngine::Connect(const AscendString &peer, int32_t) {
  return access(file_of(peer).c_str(), R_OK) ? FAILED : SUCCESS;
}
Status AdxlEngine::Disconnect(const AscendString &, int32_t) { return SUCCESS; }

Status AdxlEngine::TransferSync(const AscendString &peer, TransferOp operation, const std::vector<TransferOpDesc> &ops,
                                int32_t timeout_ms) {
  auto link = engine_->connect(peer, timeout_ms);
  if (!link) return NOT_CONNECTED;
  for (auto &op : ops) {
    bool known = holds(link->ours, op.local_addr, op.len) && holds(link->theirs, op.remote_addr, op.len);
    iovec here{reinterpret_cast<void *>(op.local_addr), op.len}, there{reinterpret_cast<void *>(op.remote_addr), op.len};
    ssize_t done = !known              ? -1
                   : operation == READ ? process_vm_readv(link->pid, &here, 1, &there, 1, 0)
                                       : process_vm_writev(link->pid, &here, 1, &there, 1, 0);
    if (done == static_cast<ssize_t>(op.len)) continue;
    engine_->disconnect(peer);
    return known ? FAILED : PARAM_INVALID;
  }
  return SUCCESS;
}
}  // namespace adxl

// Of CANN's runtime, and not of the simulated one: a simulated device has the same number everywhere.
extern "C" int aclrtGetPhyDevIdByLogicDevId(int32_t logical, int32_t *physical) {
  *physical = logical;
  return 0;
}

// Mooncake is linked with these, and calls none of them for device memory.
#define ABSENT(name) extern "C" int name() { return 207000; }
ABSENT(aclrtGetLogicDevIdByUserDevId)
ABSENT(aclrtHostRegister)
ABSENT(aclrtMemExportToShareableHandleV2)
ABSENT(aclrtMemGetAllocationGranularity)
ABSENT(aclrtMemImportFromShareableHandleV2)
ABSENT(aclrtMemSetAccess)
ABSENT(aclrtStreamAbort)
ABSENT(aclrtIpcMemClose)
ABSENT(aclrtIpcMemGetExportKey)
ABSENT(aclrtIpcMemImportByKey)
