-- Put before every script of the prefixes' index. KEYS: names (sorted set, by name), used (sorted set: name by when it
-- was used last), bytes (hash: name -> bytes, and "total"), tenants (sorted set: tenant by bytes).
-- A name is "tenant:family:position:digest", tenant in TENANT_LETTERS letters. Entries are keys of their own, anywhere in
-- a cluster and with their own expiry; whoever drops a name deletes its entry. Times are microseconds of this clock.
local names_key, used_key, bytes_key, tenants_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local TENANT_LETTERS = 16
local BATCH = 100

local function tenant_of(name)
  return string.sub(name, 1, TENANT_LETTERS)
end

local function forget(name)
  local size = redis.call('HGET', bytes_key, name)
  if not size then return false end
  redis.call('HDEL', bytes_key, name)
  redis.call('ZREM', names_key, name)
  redis.call('ZREM', used_key, name)
  redis.call('HINCRBY', bytes_key, 'total', whole(-size))
  local left = redis.call('ZINCRBY', tenants_key, whole(-size), tenant_of(name))
  if tonumber(left) <= 0 then redis.call('ZREM', tenants_key, tenant_of(name)) end
  return true
end

local function add(name, size)
  redis.call('HSET', bytes_key, name, size)
  redis.call('ZADD', names_key, 0, name)
  redis.call('ZADD', used_key, whole(clock_us()), name)
  redis.call('HINCRBY', bytes_key, 'total', size)
  redis.call('ZINCRBY', tenants_key, size, tenant_of(name))
end

local function total()
  return tonumber(redis.call('HGET', bytes_key, 'total') or '0')
end

-- The tenant's least recently used name.
local function oldest_of(tenant)
  local start = 0
  while true do
    local names = redis.call('ZRANGE', used_key, start, start + BATCH - 1)
    for _, name in ipairs(names) do
      if tenant_of(name) == tenant then return name end
    end
    if #names < BATCH then return nil end
    start = start + BATCH
  end
end

-- The names that were not used for `ttl_us`, at most BATCH of them.
local function drop_expired(ttl_us)
  local until_us = whole(clock_us() - ttl_us)
  local expired = redis.call('ZRANGE', used_key, '-inf', until_us, 'BYSCORE', 'LIMIT', 0, BATCH)
  for _, name in ipairs(expired) do forget(name) end
  return expired
end
