"""The index's scripts. Redis runs each without interruption, on the keys of one chain only.

    fm:{<root>}:<page key>              hash  <kind>:<tier>:<owner> → bytes,digest,generation,tag
    fm:{<root>}:owners                  set   the owners that hold some of it: <node>#<epoch>
    fm:{<root>}:<kind>:<tier>:<owner>   set   the page keys of its window units, or its snapshots

The sets hold no more than the hashes; one call checks many pages in them, where reading each page's
hash cost 0.9 µs a page. Page keys are in hex. The scripts do not check tags: they return the
entries that the caller must check (see `index_seals`).
"""

from __future__ import annotations

COMMIT = """
-- The whole group or nothing. What earlier lives of this node said of these pages is removed.
-- KEYS: fm:{root}   ARGV: node, epoch, tier, seconds to live, then (page key, kind, value) per unit
local node, epoch, tier, ttl = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local owner = node .. '#' .. epoch
local function keep(name, member)
    redis.call('SADD', name, member)
    redis.call('EXPIRE', name, ttl)
end

local function remove_earlier(name)
    for _, field in ipairs(redis.call('HKEYS', name)) do
        local whose, life = string.match(field, '^%a+:%a+:(.+)#(%d+)$')
        if whose == node and life ~= epoch then redis.call('HDEL', name, field) end
    end
end

for at = 5, #ARGV, 3 do
    local key, kind = ARGV[at], ARGV[at + 1]
    local name = KEYS[1] .. ':' .. key
    remove_earlier(name)
    redis.call('HSET', name, kind .. ':' .. tier .. ':' .. owner, ARGV[at + 2])
    redis.call('EXPIRE', name, ttl)
    if kind ~= 'full' then keep(table.concat({KEYS[1], kind, tier, owner}, ':'), key) end
end
keep(KEYS[1] .. ':owners', owner)
"""

FORGET = """
-- KEYS: fm:{root}   ARGV: owner, tier, then (page key, kind) per unit
for at = 3, #ARGV, 2 do
    local key, suffix = ARGV[at], ARGV[at + 1] .. ':' .. ARGV[2] .. ':' .. ARGV[1]
    redis.call('HDEL', KEYS[1] .. ':' .. key, suffix)
    if ARGV[at + 1] ~= 'full' then redis.call('SREM', KEYS[1] .. ':' .. suffix, key) end
end
"""

DIGESTS = """
-- An owner's entries of units: for each unit that of the host tier, then that of storage, or '-'.
-- KEYS: fm:{root}   ARGV: owner, then (page key, kind) per unit
local said, host, storage = {}, ':host:' .. ARGV[1], ':storage:' .. ARGV[1]
for at = 2, #ARGV, 2 do
    local kind = ARGV[at + 1]
    local values = redis.call('HMGET', KEYS[1] .. ':' .. ARGV[at], kind .. host, kind .. storage)
    for tier = 1, 2 do said[#said + 1] = values[tier] or '-' end
end
return said
"""

LONGEST = """
-- The longest usable prefix of a chain, per living node: over both tiers, and over the host alone;
-- and for each of the two ends the entries there, kind by kind and tier by tier, '-' for none.
-- KEYS: fm:{root}   ARGV: packed page keys, page size, window length, kinds, then (node, epoch)...
local root, packed = KEYS[1], ARGV[1]
local page_size, window_len, num_pages = tonumber(ARGV[2]), tonumber(ARGV[3]), #ARGV[1] / 32
local HOST, BOTH = {'host'}, {'host', 'storage'}
local CHUNK, MAX_REMOVED, checks_left = 128, 512, 65536
local wants = {}
local kinds = {}
for kind in string.gmatch(ARGV[4], '%a+') do
    wants[kind] = true
    kinds[#kinds + 1] = kind
end
local living = {}
for at = 5, #ARGV, 2 do living[ARGV[at]] = ARGV[at + 1] end

local function key(page) return string.sub(packed, page * 32 - 31, page * 32) end

-- The keys of a chunk of pages, and where each key of the chain is: made once, when first needed.
local chunk_keys, pages_by_key = {}, nil
local function keys_of(chunk)
    if chunk_keys[chunk] then return chunk_keys[chunk] end
    local keys = {}
    for page = chunk * CHUNK + 1, math.min(num_pages, (chunk + 1) * CHUNK) do
        keys[#keys + 1] = key(page)
    end
    chunk_keys[chunk] = keys
    return keys
end

local function page_of(name)
    if not pages_by_key then
        pages_by_key = {}
        checks_left = checks_left - num_pages
        for page = 1, num_pages do pages_by_key[key(page)] = page end
    end
    return pages_by_key[name]
end

-- Full pages are evicted leaf first, so presence is prefix-closed in the host tier, and in both
-- tiers together: bisection finds its end.
local function full_depth(tiers, owner, high)
    if not wants.full then return high end
    local fields, low = {}, 0
    for _, tier in ipairs(tiers) do fields[#fields + 1] = 'full:' .. tier .. ':' .. owner end
    while low < high do
        local middle = math.ceil((low + high) / 2)
        local held = redis.call('HMGET', root .. ':' .. key(middle), unpack(fields))
        if held[1] or held[2] then low = middle else high = middle - 1 end
    end
    return low
end

-- A function that gives the deepest page held of a kind, at `page` or before it; called with pages
-- that never rise. The sets of an owner are asked for one chunk of keys; if that was not enough and
-- they have fewer members than the chain has pages, they are listed, else the next chunk is asked.
local function deepest(kind, tiers, owner)
    local sets, num_members, held, listed = {}, 0, {}, nil
    for _, tier in ipairs(tiers) do
        local name = table.concat({root, kind, tier, owner}, ':')
        local size = redis.call('SCARD', name)
        if size > 0 then sets[#sets + 1], num_members = name, num_members + size end
    end

    local function ask(chunk)
        local keys, found = keys_of(chunk), {}
        for _, name in ipairs(sets) do
            checks_left = checks_left - #keys
            for i, is_held in ipairs(redis.call('SMISMEMBER', name, unpack(keys))) do
                if is_held == 1 then found[chunk * CHUNK + i] = true end
            end
        end
        held[chunk] = found
    end

    local function list()
        listed, checks_left = {}, checks_left - num_members
        for _, name in ipairs(sets) do
            for _, member in ipairs(redis.call('SMEMBERS', name)) do
                listed[#listed + 1] = page_of(member)
            end
        end
        table.sort(listed)
    end

    return function(page)
        while page > 0 and #sets > 0 and not listed do
            local chunk = math.floor((page - 1) / CHUNK)
            if not held[chunk] then
                if checks_left <= 0 then return 0 end
                if next(held) and num_members <= num_pages then list() else ask(chunk) end
            end
            if not listed then
                local found = held[chunk]
                while page > chunk * CHUNK do
                    if found[page] then return page end
                    page = page - 1
                end
            end
        end
        if not listed then return 0 end
        while #listed > 0 and listed[#listed] > page do listed[#listed] = nil end
        return listed[#listed] or 0
    end
end

-- From the end of the full pages down to a snapshot whose window is there. A window page that is
-- missing rules out all ends up to the one that no longer needs it: each page is met once.
local function usable_depth(depth, tiers, owner)
    local last_snapshot = wants.recurrent and deepest('recurrent', tiers, owner)
    local last_window = wants.window and deepest('window', tiers, owner)
    while depth > 0 do
        if last_snapshot then depth = last_snapshot(depth) end
        if not last_window or depth == 0 then return depth end
        local first = math.floor(math.max(0, depth * page_size - window_len + 1) / page_size) + 1
        local page = depth
        while page >= first and last_window(page) == page do page = page - 1 end
        if page < first then return depth end
        depth = math.min(page - 1, last_window(page))
    end
    return 0
end

-- What an earlier life of a living node said of this chain: the deepest pages first, some a call.
local function remove(owner)
    local fields, depth = {}, full_depth(BOTH, owner, num_pages)
    for _, kind in ipairs({'full', 'window', 'recurrent'}) do
        for _, tier in ipairs(BOTH) do
            fields[#fields + 1] = kind .. ':' .. tier .. ':' .. owner
        end
    end
    local first = math.max(1, depth - MAX_REMOVED + 1)
    for page = depth, first, -1 do redis.call('HDEL', root .. ':' .. key(page), unpack(fields)) end
    if first > 1 and wants.full then return end
    for _, field in ipairs(fields) do redis.call('DEL', root .. ':' .. field) end
    redis.call('SREM', root .. ':owners', owner)
end

local function entries_at(page, owner)
    local fields, said = {}, {}
    for _, kind in ipairs(kinds) do
        for _, tier in ipairs(BOTH) do fields[#fields + 1] = kind .. ':' .. tier .. ':' .. owner end
    end
    if page == 0 or #fields == 0 then return '' end
    local values = redis.call('HMGET', root .. ':' .. key(page), unpack(fields))
    for at = 1, #fields do said[at] = values[at] or '-' end
    return table.concat(said, ' ')
end

local found = {}
local owners = redis.call('SMEMBERS', root .. ':owners')
table.sort(owners)
for _, owner in ipairs(owners) do
    local node, epoch = string.match(owner, '^(.+)#(%d+)$')
    if living[node] == epoch then
        local usable = usable_depth(full_depth(BOTH, owner, num_pages), BOTH, owner)
        if usable > 0 then
            local alone = usable_depth(full_depth(HOST, owner, usable), HOST, owner)
            local ends = {entries_at(usable, owner), entries_at(alone, owner)}
            for _, value in ipairs({node, usable, alone, unpack(ends)}) do
                found[#found + 1] = value
            end
        end
    elseif living[node] then
        remove(owner)
    end
end
return found
"""
