#include "host/waits.h"

#include <algorithm>

#include "host/block.h"

namespace astrai::host {

namespace {

constexpr size_t MAX_GROUPS = 8;

struct Group {
    std::string state;
    std::vector<int> threads;
};

std::string describe_state(const Thread& thread) {
    if (thread.has_ended) {
        return "ended";
    }
    if (thread.waits_in == Collective::none) {
        return "on the way";
    }
    return std::string("in ") + name_of(thread.waits_in) + " at " + describe(thread.site);
}

// "0-15, 17" of ascending numbers.
std::string describe_ranges(const std::vector<int>& numbers) {
    std::string text;
    for (size_t i = 0; i < numbers.size();) {
        size_t last = i;
        while (last + 1 < numbers.size() && numbers[last + 1] == numbers[last] + 1) {
            ++last;
        }
        text += (text.empty() ? "" : ", ") + std::to_string(numbers[i]);
        text += last > i ? "-" + std::to_string(numbers[last]) : "";
        i = last + 1;
    }
    return text;
}

}  // namespace

std::string describe_lanes(uint32_t mask) {
    std::vector<int> lanes;
    for (int lane = 0; lane < LANES; ++lane) {
        if ((mask >> lane & 1u) != 0) {
            lanes.push_back(lane);
        }
    }
    return (lanes.size() == 1 ? "lane " : "lanes ") + describe_ranges(lanes);
}

std::string describe_threads(const std::vector<Thread>& threads, int num_threads) {
    std::vector<Group> groups;
    for (int i = 0; i < num_threads; ++i) {
        const std::string state = describe_state(threads[i]);
        auto group =
            std::find_if(groups.begin(), groups.end(), [&](const Group& g) { return g.state == state; });
        if (group == groups.end()) {
            group = groups.insert(groups.end(), {state, {}});
        }
        group->threads.push_back(i);
    }
    std::string text;
    for (size_t i = 0; i < std::min(groups.size(), MAX_GROUPS); ++i) {
        text += (i == 0 ? "" : "; ") + std::string(groups[i].threads.size() == 1 ? "thread " : "threads ") +
                describe_ranges(groups[i].threads) + " " + groups[i].state;
    }
    return text + (groups.size() > MAX_GROUPS ? "; ..." : "");
}

}  // namespace astrai::host
